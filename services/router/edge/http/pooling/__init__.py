"""`/v1/embeddings`, `/v1/score` and `/v1/rerank`: prompts that are read and not answered."""
