"""Any metric of every group of rows: streamed (`ByGroup`), or of a function (`by_group`)."""
