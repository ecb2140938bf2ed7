"""Operations on the whole fleet's KV cache: statistics, flush, pins, and a watch for failures."""
