"""The 512 words that the token oracle writes with. The order is part of the oracle: never change it."""

WORDS: tuple[str, ...] = tuple(
    """
    able acorn actor adapt agent alarm album alder alert align alley allow alloy alpha amber
    ample angle ankle apple apron arbor arch arena argue arrow ash atlas atom attic audio autumn
    award axis azure badge balance balcony bamboo banana banner barley barn baron basil basin
    basket beacon beach beam bean bear beaver beech bell bench berry birch bird blade blanket
    bloom blossom blue board boat bolt bonus book boot bottle boulder bow bowl box branch brass
    brave breeze brick bridge bright bronze brook broom brush bucket bugle bulb bundle butter
    button cabin cable cactus camera canal candle canoe canvas canyon cape carbon cargo carrot
    cart castle cedar cellar chain chair chalk charm cherry chest chorus cider circle citrus
    city clam clear cliff clock cloud clover coal coast cobalt cocoa compass copper coral cork
    corn cotton cousin cove crater cream creek crest cricket crisp crow crown crystal curve
    cycle cypress daisy dance dawn deer delta desert diamond dolphin donkey door dove dragon
    drift drum dusk eagle early earth east echo eclipse edge elm ember emerald engine epoch
    evening ever fable falcon feather fern ferry festival fiddle field fig finch flag flame
    flint flock flora flour flute foal fog forge fossil fountain fox frame freight fresh frost
    galaxy garden garlic garnet gate gentle geyser ginger glacier glide globe glove goat gold
    goose grain granite grass gravel green grove guitar gull hammer harbor hare harvest hawk
    hazel heath hedge helmet herb heron hill hinge holly honey horizon horn horse house hut
    indigo inlet ink iris iron island ivory ivy jacket jasmine jay jewel jolly journey juice
    jungle juniper kettle key kind king kite kiwi koala lace ladder lake lamp lantern larch lark
    latch laurel lava leaf ledge lemon lentil level light lilac lily lime lion lizard llama
    lobster locket lodge lotus lunar lyric magnet magpie maize mango mantle maple marble margin
    marvel meadow medal melon mesa metal meteor milk mineral mint mirror mist monkey moon moose
    morning mosaic motor mountain mouse muse museum music nectar needle nickel night noble north
    novel nutmeg oak oasis oat olive onion onyx opal orange orbit orchard orchid oval owl oxygen
    oyster paddle palace palm panda panel parade parrot path peach peak pear pearl pebble pencil
    pepper petal piano pigeon pilot pine planet plaza pocket poem polar pond pony poplar poppy
    port potato prism puffin pulse pumpkin quail quartz queen quiet quilt rabbit radar radish
    rain raven ray reed reef rice ridge ring river road robin rocket roof rose rover ruby rudder
    saddle saffron sage sail salmon sand sapphire satin scarf scout sea seed shade shore silk
    silver sketch sky slate sleet smoke snow song south spark sparrow spice spider spire spring
    square squid star steam steel stone stork storm stream summit sun swallow swan swift table
    tango tea thistle thunder tide tiger timber tin toast topaz torch trail train travel tree
    trout tulip tundra tunnel twig umber valley vapor velvet vessel viola violet vista voyage
    wagon walnut walrus water wave west whale wheel willow wind window wing winter wolf wood
    wool yarn yellow yew young zebra zenith zephyr zinc
    """.split()
)
