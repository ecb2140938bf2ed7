"""What all settings are made of, and the groups of them that several places share."""
