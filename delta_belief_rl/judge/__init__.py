"""Judges, and the pool that asks their replicas."""
