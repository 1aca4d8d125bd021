"""Studies: many runs that answer one question together. They compose training and tasks, and never import report."""
