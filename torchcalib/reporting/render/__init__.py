"""Results as pages, pictures and terminal output."""
