"""What must hold of each op, a folder an op: its table of properties, inputs, relations and counterfactuals."""
