"""Any layout to any layout: which bytes go where. Integers only.

blocks    the blocks of a request in one group, the tokens they hold, and pairs of them
compare   whether two layouts are of one computation, stored alike
overlap   what both sides hold of a layer
lanes     the copies of one pair of blocks, and of many; what is equal inside travels whole
copies    source, destination, nbytes: the one type for copies
route     Route: from layout to layout, for any request
sources   which peers bring what
ways      which way pieces take over a network, by what each way brings
price     what a route costs before anything is sent, by the way that an agent takes
"""
