"""Mixture-of-experts layers: router, dispatch, experts; README.md walks through one step."""
