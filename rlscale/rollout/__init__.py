"""Generation: engines in processes of their own behind one protocol, claimed prompts, weights handed over as shards."""
