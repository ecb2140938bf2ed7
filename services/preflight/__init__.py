"""Checks of a machine before a component is started there: `tandem preflight`."""
