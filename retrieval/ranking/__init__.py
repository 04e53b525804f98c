"""Exact ranks by counting: a retrieval problem goes in, the ranks of its queries come out."""
