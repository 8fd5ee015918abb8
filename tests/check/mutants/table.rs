//! The mistakes that the judge must find.

use super::{Edit, Mutant, Setting};
use crate::support::Topology::{Cluster, Quorum3, Standalone};

/// For mistakes that are found soon if requests are sent again.
const RESENT: Setting =
    Setting { topology: Standalone, seconds: 15, linger: 200, sets: 40, faults: &["reset", "script-flush"] };

/// For mistakes of a quorum whose minority is away.
const MINORITY: Setting =
    Setting { topology: Quorum3, seconds: 20, linger: 200, sets: 40, faults: &["minority", "reset"] };

/// For mistakes of leases that are renewed, or that have expired.
pub(super) const LINGERING: Setting =
    Setting { topology: Standalone, seconds: 20, linger: 20, sets: 40, faults: &["worker-stopped"] };

/// For mistakes that are found if the server loses locks that are held.
const FORGOTTEN: Setting =
    Setting { topology: Standalone, seconds: 20, linger: 10, sets: 40, faults: &["flushall"] };

/// For mistakes of renewed leases while a minority is away.
const OUTLASTED: Setting =
    Setting { topology: Quorum3, seconds: 30, linger: 10, sets: 40, faults: &["minority", "node-emptied"] };

/// Each mistake is as small as a real one.
pub const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "release-without-holder-check",
        edits: &[Edit {
            file: "lua/mutex.lua",
            from: "    is_over = holder == attempt\n",
            to: "    is_over = holder ~= false\n",
        }],
        setting: RESENT,
        rules: &["exclusion"],
    },
    Mutant {
        name: "acquire-of-a-held-lock",
        edits: &[Edit {
            file: "lua/mutex.lua",
            from: "  if holder == attempt then return nil, holder, pttl end\n",
            to: "  if holder then return nil, holder, pttl end\n",
        }],
        setting: RESENT,
        rules: &["exclusion"],
    },
    Mutant {
        name: "several-locks-in-any-order",
        edits: &[Edit {
            file: "src/all.rs",
            from: "        members.sort_by(|one, other| one.name().key().cmp(other.name().key()));\n",
            to: "",
        }],
        setting: Setting {
            topology: Standalone,
            seconds: 40,
            linger: 200,
            sets: 2,
            faults: &["worker-killed"],
        },
        // Workers that wait for each other never end.
        rules: &["left behind"],
    },
    Mutant {
        name: "validity-from-the-reply",
        edits: &[
            Edit {
                file: "src/lease/attempt_guard.rs",
                from: "let Some(sent) = tally.granted_since else",
                to: "let Some(sent) = tally.granted_since.map(|_| crate::clock::Moment::now()) else",
            },
            Edit {
                file: "src/lease/renewal.rs",
                from: "        let (mut gone, mut degraded, mut doubtful) =",
                to: "        let sent = Moment::now();\n        let (mut gone, mut degraded, mut doubtful) =",
            },
        ],
        setting: Setting {
            topology: Standalone,
            seconds: 25,
            linger: 20,
            sets: 40,
            faults: &["slow", "replies-held"],
        },
        rules: &["deadline", "exclusion", "backing"],
    },
    Mutant {
        name: "renewal-revives-a-lost-lock",
        edits: &[Edit {
            file: "lua/mutex.lua",
            from: "    local pttl = redis.pcall('GET', KEYS[i]) == ARGV[1 + i] and redis.pcall('PTTL', KEYS[i])\n",
            to: "    redis.call('SET', KEYS[i], ARGV[1 + i], 'PX', ttl_ms)\n    local pttl = redis.pcall('PTTL', KEYS[i])\n",
        }],
        setting: FORGOTTEN,
        rules: &["bounded loss", "exclusion", "release"],
    },
    Mutant {
        name: "half-is-a-majority",
        edits: &[Edit { file: "src/deployment.rs", from: "nodes / 2 + 1", to: "nodes / 2" }],
        setting: MINORITY,
        rules: &["exclusion"],
    },
    Mutant {
        name: "no-minimum-token",
        edits: &[Edit {
            file: "src/wire/request.rs",
            from: "Word::MinimumToken => cmd.arg(self.clock.minimum_token()),",
            to: "Word::MinimumToken => cmd.arg(self.clock.minimum_token().min(0)),",
        }],
        setting: Setting {
            topology: Standalone,
            seconds: 15,
            linger: 200,
            sets: 40,
            faults: &["server-set-back"],
        },
        rules: &["token order", "token unique"],
    },
    Mutant {
        name: "nested-hold-with-its-own-token",
        edits: &[Edit {
            file: "lua/reentrant.lua",
            from: "  elseif not token then\n    token, refusal = next_tokens(",
            to: "  elseif not token or hold and not hold.has_attempt then\n    token, refusal = next_tokens(",
        }],
        setting: RESENT,
        rules: &["nested token"],
    },
    Mutant {
        name: "one-ttl-for-all-readers",
        edits: &[Edit {
            file: "lua/rwlock.lua",
            from: "  if ends < until_then or call.successor then\n",
            to: "  if ends < until_then or call.successor then\n    for _, each in ipairs(redis.call('HKEYS', lock.key)) do\n      local rest = string.sub(each, 1, 5) == 'read:' and string.match(redis.call('HGET', lock.key, each), ' .*$')\n      if rest then redis.call('HSET', lock.key, each, until_then .. rest) end\n    end\n",
        }],
        setting: Setting {
            topology: Standalone,
            seconds: 35,
            linger: 8,
            sets: 40,
            faults: &["worker-killed"],
        },
        rules: &["own end"],
    },
    Mutant {
        name: "downgrade-with-a-gap",
        edits: &[Edit {
            file: "lua/rwlock.lua",
            from: "    give_back_spare(lock, writes, call)\n  end\n  local hold",
            to: "    give_back_spare(lock, writes, call)\n    admit_waiters(lock, call)\n  end\n  local hold",
        }],
        setting: RESENT,
        rules: &["exclusion"],
    },
    Mutant {
        name: "waiters-do-not-poll",
        edits: &[Edit {
            file: "src/lease/progress.rs",
            from: "timeout_at(until, mailbox.wait())",
            to: "timeout_at(until + Duration::from_secs(3600), mailbox.wait())",
        }],
        setting: Setting {
            topology: Standalone,
            seconds: 15,
            linger: 6,
            sets: 40,
            faults: &["worker-killed"],
        },
        rules: &["waiting", "left behind"],
    },
    Mutant {
        name: "dead-waiters-count-as-alive",
        edits: &[
            Edit {
                file: "lua/mutex.lua",
                from: "  return math.abs(time - place) < claim_ms * 1000\n    or",
                to: "  return true\n    or",
            },
            Edit {
                file: "lua/reentrant.lua",
                from: "  return math.abs(time - place) < claim_ms * 1000\n    or",
                to: "  return true\n    or",
            },
            Edit {
                file: "lua/rwlock.lua",
                from: "  return math.abs(time - place) < claim_ms * 1000\n    or",
                to: "  return true\n    or",
            },
        ],
        // On a cluster, a node cannot notice that a notified waiter is dead either.
        setting: Setting { topology: Cluster, seconds: 45, linger: 6, sets: 40, faults: &["worker-killed"] },
        rules: &["waiting", "left behind"],
    },
    Mutant {
        name: "missing-reply-counts-as-renewed",
        edits: &[Edit {
            file: "src/lease/renewal.rs",
            from: "        } else {\n            LeaseState::Unknown\n",
            to: "        } else {\n            LeaseState::Held\n",
        }],
        setting: Setting {
            topology: Standalone,
            seconds: 25,
            linger: 40,
            sets: 40,
            faults: &["half-open", "server-stopped"],
        },
        rules: &["exclusion", "backing", "release"],
    },
    Mutant {
        name: "dropped-guards-not-released",
        edits: &[
            Edit {
                file: "src/lease/attempt_guard.rs",
                from: "            Standing::New | Standing::Left => return,\n",
                to: "            Standing::Asked { .. } | Standing::Waiting => return,\n            Standing::New | Standing::Left => return,\n",
            },
            Edit {
                file: "src/lease/attempt_guard.rs",
                from: "        self.leave();\n        if let Some(is_final)",
                to: "        self.leak();\n        if let Some(is_final)",
            },
        ],
        setting: RESENT,
        rules: &["waiting"],
    },
    Mutant {
        name: "claim-from-its-message",
        edits: &[Edit {
            file: "src/lease/grant_clock.rs",
            from: "let granted = sample.earliest(time, attempt.options.drift, now)?;",
            to: "let granted = sample.earliest(time, attempt.options.drift, now).map(|_| now)?;",
        }],
        setting: Setting {
            topology: Standalone,
            seconds: 45,
            linger: 200,
            sets: 40,
            faults: &["worker-stopped"],
        },
        rules: &["deadline", "exclusion"],
    },
    Mutant {
        name: "deadline-not-checked",
        edits: &[Edit {
            file: "src/lease/lease.rs",
            from: "self.0.deadline.has_passed().then(",
            to: "self.0.deadline.get().is_none().then(",
        }],
        setting: LINGERING,
        rules: &["deadline"],
    },
    Mutant {
        name: "lost-counts-as-unknown",
        edits: &[Edit {
            file: "src/lease/renewal.rs",
            from: "            LeaseState::Lost\n        } else if",
            to: "            LeaseState::Unknown\n        } else if",
        }],
        setting: FORGOTTEN,
        rules: &["bounded loss"],
    },
    Mutant {
        name: "never-renewed",
        edits: &[Edit {
            file: "src/lease/keeper.rs",
            from: "            Renewal::Automatic => lease.counts_from() + soon",
            to: "            Renewal::Automatic => lease.until() + soon",
        }],
        setting: LINGERING,
        rules: &["false loss"],
    },
    Mutant {
        name: "losses-not-reported",
        edits: &[Edit {
            file: "src/lease/lease.rs",
            from: "    pub async fn lost(&self) -> LeaseEnd {\n",
            to: "    pub async fn lost(&self) -> LeaseEnd {\n        std::future::pending::<()>().await;\n",
        }],
        setting: LINGERING,
        rules: &["late report"],
    },
    Mutant {
        name: "missing-reply-counts-as-released",
        edits: &[
            Edit {
                file: "src/lease/release.rs",
                from: "(ReleaseTally::default(), REQUEST_TRIES)",
                to: "(ReleaseTally::default(), REQUEST_TRIES / REQUEST_TRIES)",
            },
            Edit {
                file: "src/lease/release.rs",
                from: "                _ => Err(failure.with_effect_if(!tally.unanswered.is_empty())),\n            };",
                to: "                _ => {\n                    let _silent = failure;\n                    Ok(ReleaseOutcome::Released)\n                }\n            };",
            },
        ],
        setting: Setting { topology: Standalone, seconds: 60, linger: 200, sets: 8, faults: &["cut"] },
        rules: &["release"],
    },
    Mutant {
        name: "all-nodes-must-renew",
        edits: &[Edit {
            file: "src/lease/renewal.rs",
            from: "nodes.deployment.is_majority(tally.positive)",
            to: "(tally.positive == nodes.all_nodes())",
        }],
        setting: OUTLASTED,
        rules: &["false loss"],
    },
    Mutant {
        name: "all-nodes-must-grant",
        edits: &[Edit {
            file: "src/lease/reply_tally.rs",
            from: "self.deployment.is_majority(self.nodes.positive)",
            to: "(self.nodes.positive.len() == self.deployment.nodes)",
        }],
        setting: OUTLASTED,
        rules: &["decision"],
    },
    Mutant {
        name: "lost-with-its-master-counts-as-unknown",
        edits: &[
            Edit {
                file: "src/lease/renewal.rs",
                from: "            LeaseState::Lost\n        } else if",
                to: "            LeaseState::Unknown\n        } else if",
            },
            Edit {
                // Otherwise the mistake would be repaired: after an unknown reply, a renewal
                // acquires a free lock again.
                file: "src/lease/renewal.rs",
                from: "let is_degraded = tally.state",
                to: "let is_degraded = false && tally.state",
            },
        ],
        setting: Setting { topology: Cluster, seconds: 90, linger: 6, sets: 40, faults: &["failover"] },
        rules: &["bounded loss"],
    },
    Mutant {
        name: "nested-hold-not-counted",
        edits: &[Edit {
            file: "lua/reentrant.lua",
            from: "redis.call('HSET', lock, owner, hold.count + 1, ",
            to: "redis.call('HSET', lock, owner, hold.count, ",
        }],
        setting: RESENT,
        rules: &["count"],
    },
    Mutant {
        name: "readers-tokens-older-than-the-writer",
        edits: &[Edit {
            file: "lua/rwlock.lua",
            from: "    if stored == 1 then\n      answers[i] = token\n",
            to: "    if stored == 1 then\n      answers[i] = verb == 'read' and token > 0 and token - 1 or token\n",
        }],
        setting: RESENT,
        rules: &["token order"],
    },
    Mutant {
        name: "counters-kept-too-long",
        edits: &[Edit {
            file: "lua/mutex.lua",
            from: "token_ttl_ms = token_ttl_ms or '3600000'\n",
            to: "token_ttl_ms = token_ttl_ms or '36000000'\n",
        }],
        setting: RESENT,
        rules: &["left behind"],
    },
    Mutant {
        name: "resource-accepts-every-token",
        edits: &[Edit {
            file: "lua/fenced.lua",
            from: "if tonumber(token) < tonumber(largest) then return 0 end\n",
            to: "",
        }],
        setting: LINGERING,
        rules: &["fenced resource"],
    },
];
