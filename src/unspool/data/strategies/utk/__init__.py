"""Untie the Knots: split documents into chunks, scatter them over the row, ask for the way back."""
