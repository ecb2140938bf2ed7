"""Psalm 103 of the World English Bible (public domain), which the demo model was not trained on."""

TEXT = """Praise Yahweh, my soul! All that is within me, praise his holy name! Praise Yahweh, my soul, and don't
forget all his benefits, who forgives all your sins, who heals all your diseases, who redeems your life from
destruction, who crowns you with loving kindness and tender mercies, who satisfies your desire with good things, so
that your youth is renewed like the eagle's. Yahweh executes righteous acts, and justice for all who are oppressed. He
made known his ways to Moses, his deeds to the children of Israel. Yahweh is merciful and gracious, slow to anger, and
abundant in loving kindness. He will not always accuse; neither will he stay angry forever. He has not dealt with us
according to our sins, nor repaid us for our iniquities. For as the heavens are high above the earth, so great is his
loving kindness toward those who fear him. As far as the east is from the west, so far has he removed our
transgressions from us. Like a father has compassion on his children, so Yahweh has compassion on those who fear him.
For he knows how we are made. He remembers that we are dust. As for man, his days are like grass. As a flower of the
field, so he flourishes. For the wind passes over it, and it is gone. Its place remembers it no more. But Yahweh's
loving kindness is from everlasting to everlasting with those who fear him, his righteousness to children's children,
to those who keep his covenant, to those who remember to obey his precepts. Yahweh has established his throne in the
heavens. His kingdom rules over all. Praise Yahweh, you angels of his, who are mighty in strength, who fulfill his
word, obeying the voice of his word. Praise Yahweh, all you armies of his, you servants of his, who do his pleasure.
Praise Yahweh, all you works of his, in all places of his dominion. Praise Yahweh, my soul!""".replace("\n", " ")
