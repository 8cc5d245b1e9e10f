"""Helpers for tests of vocabshard and of code that builds on it. Nothing here runs on a scoring path."""
