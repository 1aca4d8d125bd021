"""The networks, prototypes and losses of AFiRe."""
