"""Helpers that rebuild part of a program in another layout, rank, dtype or length."""
