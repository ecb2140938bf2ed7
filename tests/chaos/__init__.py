"""Parts of a running cluster are killed, stopped and filled up: requests must not notice."""
