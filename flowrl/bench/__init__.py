"""Measurements; ratios are taken inside one run, so that they mean the same on any machine."""
