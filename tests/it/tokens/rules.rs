//! Protocols, ways to break them, and what must come of each.

/// What a request does at a node. Those that hold the lock there keep others out, if they exclude them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Takes the number if it is the largest so far, or the holder's own once more.
    Accept,
    /// Takes the number if there is no larger one.
    AcceptEqual,
    /// Adds one to the largest number.
    Count,
    /// Changes nothing but who holds the lock.
    Look,
    /// Raises the largest number. Does not ask who holds the lock.
    Store,
    /// Raises the largest number; who holds the lock may share it.
    Share,
}

impl Request {
    /// Whether it says a number in the first round.
    pub fn proposes(self) -> bool {
        !matches!(self, Request::Count | Request::Look)
    }
}

/// What an attempt makes of the answers of a majority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    Own,
    Largest,
    /// One more than the largest.
    Next,
}

/// How a token is come by.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    pub first: Request,
    pub take: Take,
    /// Sent with what was taken, until a majority has it.
    pub second: Option<Request>,
}

/// What a node that lost its memory does, one after the other, before it votes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mend {
    /// Longer than the longest ttl: attempts that counted an earlier answer of it are over by then.
    Wait,
    /// The largest numbers of a majority of the others, not all at the same instant.
    Copy,
}

/// Where a holder makes its missing key anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recreate {
    Never,
    /// Where there is no larger number than its token.
    NoneLarger,
    Anywhere,
}

/// What comes of a search.
#[derive(Clone, Copy, Debug)]
pub enum Outcome {
    /// The promises hold in so many states.
    Holds(usize),
    /// One is broken, and so many steps are the shortest way to that.
    Breaks(usize),
}

#[derive(Clone, Copy, Debug)]
pub struct Rules {
    pub title: &'static str,
    pub nodes: usize,
    pub majority: usize,
    /// One after the other: `w` for one that writes, `r` for one that reads.
    pub attempts: &'static str,
    /// The largest number that is proposed: a clock may be wrong, so all of them are tried. Nodes only ask which
    /// of two is larger, so it is enough that there are as many numbers as attempts.
    pub proposals: u32,
    pub writer: Way,
    pub reader: Way,
    pub recreate: Recreate,
    /// Whether an answer may be lost, and a request arrive any number of times.
    pub twice: bool,
    /// How often a node forgets: its holders, and its largest number for a smaller one.
    pub crashes: u32,
    pub mends: &'static [Mend],
    pub outcome: Outcome,
}

const fn way(first: Request, take: Take, second: Option<Request>) -> Way {
    Way { first, take, second }
}

const STRICT: Rules = Rules {
    title: "strict accept",
    nodes: 3,
    majority: 2,
    attempts: "www",
    proposals: 3,
    writer: way(Request::Accept, Take::Own, None),
    reader: way(Request::Share, Take::Largest, Some(Request::Share)),
    recreate: Recreate::Never,
    twice: false,
    crashes: 0,
    mends: &[Mend::Wait, Mend::Copy],
    outcome: Outcome::Holds(0),
};
const TWO: Rules = Rules { attempts: "ww", proposals: 2, ..STRICT };
const CRASH: Rules = Rules { crashes: 1, ..TWO };

const fn holds(title: &'static str, states: usize, rules: Rules) -> Rules {
    Rules { title, outcome: Outcome::Holds(states), ..rules }
}

/// With second deliveries and re-creation.
const fn all(rules: Rules) -> Rules {
    Rules { twice: true, recreate: Recreate::NoneLarger, ..rules }
}

const fn breaks(title: &'static str, steps: usize, rules: Rules) -> Rules {
    Rules { title, outcome: Outcome::Breaks(steps), ..rules }
}

/// Nodes that forget nothing. Of these lists, the second is for wider bounds.
pub const DURABLE: [&[Rules]; 2] = [
    &[
        holds("three attempts", 11_747, STRICT),
        holds("with second deliveries", 25_200, Rules { twice: true, ..STRICT }),
        holds("with re-creation", 16_658, Rules { recreate: Recreate::NoneLarger, ..STRICT }),
        holds("with both", 25_716, all(STRICT)),
    ],
    &[
        holds("four attempts", 417_886, Rules { attempts: "wwww", proposals: 4, ..STRICT }),
        holds("with both", 753_277, all(Rules { attempts: "wwww", proposals: 4, ..STRICT })),
    ],
];

pub const READERS: [&[Rules]; 2] = [
    &[
        holds("two writers and a reader", 140_272, Rules { attempts: "wwr", ..STRICT }),
        holds("a writer and two readers", 323_899, Rules { attempts: "wrr", ..STRICT }),
        holds("two writers and a reader, with both", 444_713, all(Rules { attempts: "wwr", ..STRICT })),
        holds(
            "a writer and a reader, with both and two crashes",
            72_129,
            all(Rules { attempts: "wr", crashes: 2, ..TWO }),
        ),
    ],
    &[
        holds("a writer and two readers, with both", 762_243, all(Rules { attempts: "wrr", ..STRICT })),
        holds(
            "two writers and a reader, with both and a crash",
            2_935_030,
            all(Rules { attempts: "wwr", crashes: 1, ..STRICT }),
        ),
        holds("two of each", 1_415_313, Rules { attempts: "wwrr", proposals: 2, ..STRICT }),
    ],
];

/// Nodes that forget.
pub const REJOIN: [&[Rules]; 2] = [
    &[
        holds("two attempts, two crashes", 11_359, Rules { crashes: 2, ..TWO }),
        holds("two attempts, two crashes, with both", 14_015, all(Rules { crashes: 2, ..TWO })),
        holds("three attempts, a crash", 165_185, Rules { crashes: 1, ..STRICT }),
        holds("three attempts, a crash, with both", 213_276, all(Rules { crashes: 1, ..STRICT })),
    ],
    &[
        holds("three attempts, two crashes, with both", 450_409, all(Rules { crashes: 2, ..STRICT })),
        holds(
            "four attempts, a crash",
            7_326_427,
            Rules { attempts: "wwww", proposals: 4, crashes: 1, ..STRICT },
        ),
    ],
];

/// Two attempts are enough for most.
pub const MUTANTS: &[Rules] = &[
    breaks(
        "the largest of what the nodes count",
        10,
        Rules { writer: way(Request::Count, Take::Largest, None), ..TWO },
    ),
    breaks(
        "the largest count is written back",
        14,
        Rules { writer: way(Request::Count, Take::Largest, Some(Request::Store)), ..TWO },
    ),
    breaks(
        "one more than the largest is written",
        15,
        Rules { writer: way(Request::Look, Take::Next, Some(Request::Store)), ..TWO },
    ),
    breaks(
        "an equal number is accepted from anybody",
        9,
        Rules { writer: way(Request::AcceptEqual, Take::Own, None), ..TWO },
    ),
    breaks("two of four nodes are a majority", 8, Rules { nodes: 4, ..TWO }),
    breaks("a key is made anew below a larger number", 17, Rules { recreate: Recreate::Anywhere, ..STRICT }),
    breaks("a node that lost its memory votes at once", 9, Rules { mends: &[], ..CRASH }),
    breaks("it waits, and copies nothing", 10, Rules { mends: &[Mend::Wait], ..CRASH }),
    breaks("it copies, and does not wait", 11, Rules { mends: &[Mend::Copy], ..CRASH }),
    breaks("it copies, and then it waits", 12, Rules { mends: &[Mend::Copy, Mend::Wait], ..CRASH }),
    breaks(
        "a reader takes the largest answer, and stores it nowhere",
        12,
        Rules { attempts: "wwr", reader: way(Request::Share, Take::Largest, None), ..STRICT },
    ),
    breaks(
        "a reader takes its own number whatever the answers are",
        9,
        Rules { attempts: "wr", reader: way(Request::Share, Take::Own, None), ..TWO },
    ),
];

impl Rules {
    pub fn way(&self, reads: bool) -> Way {
        if reads { self.reader } else { self.writer }
    }
}
