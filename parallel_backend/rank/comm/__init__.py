"""What moves between ranks: process group, mesh, collectives, and the record of what they cost."""
