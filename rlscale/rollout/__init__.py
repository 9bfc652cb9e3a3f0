"""Generation with vLLM: engines in processes of their own, prompts claimed by whoever is free, weights handed over as shards."""
