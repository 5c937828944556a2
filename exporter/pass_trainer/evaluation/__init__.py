"""`pass-train evaluate`: acceptance of drafts on answers to prompts that nothing was trained on."""
