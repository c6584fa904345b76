"""The properties of whole attention layers."""
