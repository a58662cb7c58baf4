"""Transfers between ranks: process group, mesh, collectives, and accounts of bytes and times."""
