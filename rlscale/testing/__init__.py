"""What shows that the other packages are right: tiny models, random batches, the comparison with one plain process.

For tests, tools and users; no run imports it.
"""
