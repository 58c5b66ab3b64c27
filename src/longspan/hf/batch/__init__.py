"""From a whole batch to a rank's tokens: documents, trees, labels, positions, and a comparison over the ranks."""
