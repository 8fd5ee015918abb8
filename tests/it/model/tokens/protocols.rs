//! Protocols, ways to break them, and the expected outcome of each.

/// The effect of a request at a node. A node refuses a request if a holder there excludes the
/// attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Accepts the number if it is the largest so far, or the holder's own once more.
    Accept,
    /// Accepts the number if there is no larger one.
    AcceptEqual,
    /// Adds one to the largest number.
    Count,
    /// Changes only the holder.
    Look,
    /// Raises the largest number, whatever the holder.
    Store,
    /// Raises the largest number; several holders may share the lock.
    Share,
}

impl Request {
    /// Whether the request proposes a number in the first round.
    pub fn proposes(self) -> bool {
        !matches!(self, Request::Count | Request::Look)
    }
}

/// The token that an attempt takes after the answers of a majority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenChoice {
    Own,
    Largest,
    /// One more than the largest.
    Next,
}

/// The rounds in which an attempt gets its token.
#[derive(Clone, Copy, Debug)]
pub struct TokenRounds {
    pub first: Request,
    pub take: TokenChoice,
    /// Sent with the token that was taken, until a majority has it.
    pub second: Option<Request>,
}

/// A step of a node that lost its data, before it votes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair {
    /// Waits for longer than the longest TTL: attempts that counted an earlier answer of this node
    /// have ended by then.
    Wait,
    /// Copies the largest numbers of a majority of the others, not all at the same instant.
    Copy,
}

/// The nodes on which a holder re-creates its missing key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recreate {
    Never,
    /// Nodes that have no larger number than its token.
    NoneLarger,
    Anywhere,
}

/// The result of a search.
#[derive(Clone, Copy, Debug)]
pub enum Outcome {
    /// The promises hold, in this number of states.
    Holds(usize),
    /// A promise is broken, after this number of steps on the shortest path.
    Breaks(usize),
}

#[derive(Clone, Copy, Debug)]
pub struct Rules {
    pub title: &'static str,
    pub nodes: usize,
    pub majority: usize,
    /// One letter per attempt: `w` for a writer, `r` for a reader.
    pub attempts: &'static str,
    /// The largest number that is proposed: a clock may be wrong, so all numbers are tried. Nodes
    /// only compare numbers, so one number per attempt suffices.
    pub proposals: u32,
    pub writer: TokenRounds,
    pub reader: TokenRounds,
    pub recreate: Recreate,
    /// Whether an answer may be lost and a request may arrive several times.
    pub twice: bool,
    /// The number of crashes. A node that crashes loses its holders, and may return to a smaller
    /// largest number.
    pub crashes: u32,
    pub repairs: &'static [Repair],
    pub outcome: Outcome,
}

const fn way(first: Request, take: TokenChoice, second: Option<Request>) -> TokenRounds {
    TokenRounds { first, take, second }
}

const STRICT: Rules = Rules {
    title: "strict accept",
    nodes: 3,
    majority: 2,
    attempts: "www",
    proposals: 3,
    writer: way(Request::Accept, TokenChoice::Own, None),
    reader: way(Request::Share, TokenChoice::Largest, Some(Request::Share)),
    recreate: Recreate::Never,
    twice: false,
    crashes: 0,
    repairs: &[Repair::Wait, Repair::Copy],
    outcome: Outcome::Holds(0),
};
const TWO: Rules = Rules { attempts: "ww", proposals: 2, ..STRICT };
const CRASH: Rules = Rules { crashes: 1, ..TWO };

const fn holds(title: &'static str, states: usize, rules: Rules) -> Rules {
    Rules { title, outcome: Outcome::Holds(states), ..rules }
}

/// Adds second deliveries and re-creation.
const fn all(rules: Rules) -> Rules {
    Rules { twice: true, recreate: Recreate::NoneLarger, ..rules }
}

const fn breaks(title: &'static str, steps: usize, rules: Rules) -> Rules {
    Rules { title, outcome: Outcome::Breaks(steps), ..rules }
}

/// Nodes that lose no data. The second of these lists is for wider bounds.
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

/// Nodes that lose data.
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

/// Broken protocols. Two attempts suffice to break most.
pub const MUTANTS: &[Rules] = &[
    breaks(
        "the largest of what the nodes count",
        10,
        Rules { writer: way(Request::Count, TokenChoice::Largest, None), ..TWO },
    ),
    breaks(
        "the largest count is written back",
        14,
        Rules { writer: way(Request::Count, TokenChoice::Largest, Some(Request::Store)), ..TWO },
    ),
    breaks(
        "one more than the largest is written",
        15,
        Rules { writer: way(Request::Look, TokenChoice::Next, Some(Request::Store)), ..TWO },
    ),
    breaks(
        "an equal number is accepted from any attempt",
        9,
        Rules { writer: way(Request::AcceptEqual, TokenChoice::Own, None), ..TWO },
    ),
    breaks("two of four nodes are a majority", 8, Rules { nodes: 4, ..TWO }),
    breaks("a key is re-created below a larger number", 17, Rules { recreate: Recreate::Anywhere, ..STRICT }),
    breaks("a node that lost its data votes at once", 9, Rules { repairs: &[], ..CRASH }),
    breaks("it waits, and copies nothing", 10, Rules { repairs: &[Repair::Wait], ..CRASH }),
    breaks("it copies, and does not wait", 11, Rules { repairs: &[Repair::Copy], ..CRASH }),
    breaks("it copies, and then it waits", 12, Rules { repairs: &[Repair::Copy, Repair::Wait], ..CRASH }),
    breaks(
        "a reader takes the largest answer, and stores it nowhere",
        12,
        Rules { attempts: "wwr", reader: way(Request::Share, TokenChoice::Largest, None), ..STRICT },
    ),
    breaks(
        "a reader takes its own number whatever the answers are",
        9,
        Rules { attempts: "wr", reader: way(Request::Share, TokenChoice::Own, None), ..TWO },
    ),
];

impl Rules {
    pub fn way(&self, reads: bool) -> TokenRounds {
        if reads { self.reader } else { self.writer }
    }
}
