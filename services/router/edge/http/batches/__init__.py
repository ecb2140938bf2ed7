"""`/v1/files` and `/v1/batches`: files of requests that are answered with what is idle, and files of their answers."""
