"""What crosses processes: messages by topic, their encoding, and the channels that carry them."""
