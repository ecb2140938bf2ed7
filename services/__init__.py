"""The processes of a Tandem cluster. Services import `shared`, never each other; the launcher alone knows all."""
