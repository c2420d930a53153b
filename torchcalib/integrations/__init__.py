"""What puts the metrics into training loops of others: a room for each, imported only by whoever uses that loop."""
