"""Turn a frozen Hugging Face decoder into a PaSS bundle. Offline: uses torch; the runtime never imports this."""
