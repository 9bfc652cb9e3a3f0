"""Scoring of responses: rule verifiers, and worker processes that run them and the users' own."""
