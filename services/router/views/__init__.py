"""What is shown of requests and of the cluster: functions of request records, and of what the core holds now."""
