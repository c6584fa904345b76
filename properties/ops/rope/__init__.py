"""The properties of rotary position embedding and of its gradient."""
