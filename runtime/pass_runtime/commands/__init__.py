"""How a command starts and ends: signals, and errors in one line. For pass-run, pass-export,
pass-train and scripts."""
