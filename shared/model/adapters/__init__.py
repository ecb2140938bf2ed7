"""LoRA adapters: reading what PEFT writes, and what a decoder computes with."""
