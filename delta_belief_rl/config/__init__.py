"""Typed configuration: schema, composition, cross-field rules and the plan. Imports no torch."""
