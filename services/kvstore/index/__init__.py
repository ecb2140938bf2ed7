"""The block index: its interface, and the one over Redis or Valkey."""
