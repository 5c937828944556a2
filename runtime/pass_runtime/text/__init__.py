"""Text: tokens as text, conversations as tokens, and what a text must or must not contain."""
