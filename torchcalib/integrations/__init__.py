"""Callbacks for training loops of other packages. Each module imports its package."""
