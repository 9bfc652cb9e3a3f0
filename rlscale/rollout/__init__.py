"""Generation with vLLM: engines in processes of their own, claimed prompts, weights handed over as shards."""
