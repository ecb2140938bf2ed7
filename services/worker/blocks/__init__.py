"""Exchange of KV blocks: a worker offers them to store nodes, serves them to peers and fetches from both."""
