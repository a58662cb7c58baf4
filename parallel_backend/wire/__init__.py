"""Communication between client and ranks: messages by topic, their encoding, and the channels that carry them."""
