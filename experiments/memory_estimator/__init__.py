"""4D memory estimator (arXiv 2411.06465): whether a layout fits, in closed form."""
