"""What bound the goodput: pure policy over what each request's own timings say."""
