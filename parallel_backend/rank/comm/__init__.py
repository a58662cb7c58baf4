"""Transfers between ranks: process group, mesh, collectives, and counts of bytes and times."""
