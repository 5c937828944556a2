"""`pass-train evaluate`: measures acceptance on answers to prompts that training did not use."""
