"""What the pipeline by hand is made of: one stage, messages, weight gradients put off."""
