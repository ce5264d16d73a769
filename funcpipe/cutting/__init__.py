"""Where a model is cut, and whether the parts compute what it did: split, and the choice of stages and schedule together."""
