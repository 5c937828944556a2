"""`pass-train evaluate`: measures the acceptance of drafts on answers to prompts that were not used
for training."""
