"""Where a model is cut, whether the parts compute what it did, and the choice of stages and schedule together."""
