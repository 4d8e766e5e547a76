//! Statements of PTX text: declarations, functions and their instructions, with operands as trees.

use super::PtxError;
use super::lex::{Token, tokens};
use super::types::{Space, Ty};

/// One operand as it is written.
#[derive(Debug, Clone, PartialEq)]
pub enum Operand {
    /// A register, variable, label or special register.
    Name(String),
    /// An integer, already negated where it has a sign.
    Int(u64),
    Single(u32),
    Double(u64),
    /// `{a, b}`.
    Vector(Vec<Operand>),
    /// `[base + offset]`.
    Address(Box<Operand>, i64),
    /// `base + offset` or `name[index]` outside of brackets: the address of a variable as a value.
    Offset(Box<Operand>, i64),
    /// `a|b`.
    Pair(Box<Operand>, Box<Operand>),
    /// `!p`.
    Not(Box<Operand>),
    /// `(a, b)`, of a call.
    List(Vec<Operand>),
}

/// One instruction.
#[derive(Debug, Clone)]
pub struct Instruction {
    /// `@p` or `@!p` (true).
    pub guard: Option<(String, bool)>,
    /// Opcode and modifiers, between the dots.
    pub parts: Vec<String>,
    pub operands: Vec<Operand>,
    pub line: u32,
}

/// A variable: `.shared .align 16 .b8 name[64]`, and a parameter.
#[derive(Debug, Clone)]
pub struct Variable {
    pub space: Space,
    pub name: String,
    pub ty: Ty,
    pub align: usize,
    /// Elements; 0: an array without a size (dynamic shared memory).
    pub count: usize,
    /// `.extern`.
    pub external: bool,
    pub init: Vec<Operand>,
    pub line: u32,
}

impl Variable {
    /// Bytes.
    pub fn size(&self) -> usize {
        self.ty.size() * self.count
    }
}

/// A line of a function's body.
#[derive(Debug, Clone)]
pub enum Statement {
    /// `.reg .b32 %r<5>`: type, name, count (none: just this name).
    Registers(Ty, String, Option<usize>),
    Variable(Variable),
    Label(String),
    /// `name: .branchtargets a, b`.
    Targets(String, Vec<String>),
    Instruction(Instruction),
    Open,
    Close,
}

/// A kernel (`.entry`) or a function (`.func`).
#[derive(Debug, Clone)]
pub struct Function {
    pub name: String,
    pub entry: bool,
    pub results: Vec<Variable>,
    pub params: Vec<Variable>,
    /// `.maxntid` multiplied out.
    pub max_threads: Option<u32>,
    /// None: a declaration.
    pub body: Option<Vec<Statement>>,
    pub line: u32,
}

/// A whole module.
#[derive(Debug, Default)]
pub struct Tree {
    /// `.version`, major * 10 + minor.
    pub version: u32,
    /// `.target`, as `sm_80`.
    pub target: String,
    pub variables: Vec<Variable>,
    pub functions: Vec<Function>,
    /// `.file` entries: number and path.
    pub files: Vec<(u64, String)>,
    /// `.loc` of the source: PTX line from which it holds, file, line.
    pub locations: Vec<(u32, u64, u64)>,
}

/// Reads a module.
pub fn parse(text: &str) -> Result<Tree, PtxError> {
    let mut parser = Parser { tokens: tokens(text)?, at: 0 };
    let mut tree = Tree::default();
    while parser.at < parser.tokens.len() {
        parser.top(&mut tree)?;
    }
    if tree.version == 0 || tree.target.is_empty() {
        return Err(PtxError::new(1, "no .version or .target: this is not PTX"));
    }
    Ok(tree)
}

struct Parser<'t> {
    tokens: Vec<(Token<'t>, u32)>,
    at: usize,
}

type Parsed<T> = Result<T, PtxError>;

impl<'t> Parser<'t> {
    fn line(&self) -> u32 {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(0, |token| token.1)
    }

    fn fail<T>(&self, what: impl Into<String>) -> Parsed<T> {
        Err(PtxError::new(self.line(), what))
    }

    fn peek(&self) -> Option<&Token<'t>> {
        self.tokens.get(self.at).map(|token| &token.0)
    }

    fn next(&mut self) -> Parsed<Token<'t>> {
        match self.tokens.get(self.at) {
            Some((token, _)) => {
                self.at += 1;
                Ok(token.clone())
            }
            None => self.fail("the text ends in the middle of a statement"),
        }
    }

    fn eat(&mut self, mark: char) -> bool {
        let found = self.peek() == Some(&Token::Mark(mark));
        self.at += found as usize;
        found
    }

    fn expect(&mut self, mark: char) -> Parsed<()> {
        if self.eat(mark) { Ok(()) } else { self.fail(format!("`{mark}` expected, got {:?}", self.peek())) }
    }

    fn word(&mut self) -> Parsed<&'t str> {
        match self.next()? {
            Token::Word(word) => Ok(word),
            other => {
                self.at -= 1;
                self.fail(format!("a name expected, got {other:?}"))
            }
        }
    }

    fn int(&mut self) -> Parsed<u64> {
        let negative = self.eat('-');
        match self.next()? {
            Token::Int(value) => Ok(if negative { value.wrapping_neg() } else { value }),
            other => self.fail(format!("a number expected, got {other:?}")),
        }
    }

    fn size(&mut self) -> Parsed<usize> {
        let value = self.int()?;
        // Nothing that can be declared is larger; the bound keeps products of sizes from wrapping.
        if value > 1 << 32 { self.fail(format!("{value} is too large")) } else { Ok(value as usize) }
    }

    fn skip_to_semicolon(&mut self) -> Parsed<()> {
        while self.next()? != Token::Mark(';') {}
        Ok(())
    }

    fn top(&mut self, tree: &mut Tree) -> Parsed<()> {
        let line = self.line();
        let mut external = false;
        loop {
            match self.word()? {
                ".version" => {
                    let Token::Double(bits) = self.next()? else { return self.fail("a version like 8.0 expected") };
                    tree.version = (f64::from_bits(bits) * 10.0).round() as u32;
                    return Ok(());
                }
                ".target" => {
                    tree.target = self.word()?.to_string();
                    while self.eat(',') {
                        self.word()?;
                    }
                    return Ok(());
                }
                ".address_size" => {
                    return match self.int()? {
                        64 => Ok(()),
                        other => self.fail(format!("addresses of {other} bits; only 64 are known")),
                    };
                }
                ".file" => return self.file(tree),
                ".section" => return self.section(),
                ".pragma" | ".alias" => return self.skip_to_semicolon(),
                ".visible" | ".weak" | ".common" => {}
                ".extern" => external = true,
                ".entry" => {
                    let function = self.function(true, line, tree)?;
                    tree.functions.push(function);
                    return Ok(());
                }
                ".func" => {
                    let function = self.function(false, line, tree)?;
                    tree.functions.push(function);
                    return Ok(());
                }
                space @ (".global" | ".const" | ".shared") => {
                    let space = match space {
                        ".global" => Space::Global,
                        ".const" => Space::Const,
                        _ => Space::Shared,
                    };
                    tree.variables.extend(self.variables(space, external)?);
                    return Ok(());
                }
                other => return self.fail(format!("unknown directive `{other}`")),
            }
        }
    }

    fn file(&mut self, tree: &mut Tree) -> Parsed<()> {
        let number = self.int()?;
        let Token::Text(path) = self.next()? else { return self.fail("a path expected") };
        tree.files.push((number, path.to_string()));
        while self.eat(',') {
            self.int()?;
        }
        Ok(())
    }

    /// Debug sections are bytes that nothing here needs.
    fn section(&mut self) -> Parsed<()> {
        while !self.eat('{') {
            self.next()?;
        }
        while !self.eat('}') {
            self.next()?;
        }
        Ok(())
    }

    fn function(&mut self, entry: bool, line: u32, tree: &mut Tree) -> Parsed<Function> {
        let results = if !entry && self.eat('(') { self.parameters()? } else { Vec::new() };
        let name = self.word()?.to_string();
        let params = if self.eat('(') { self.parameters()? } else { Vec::new() };
        let mut function = Function { name, entry, results, params, max_threads: None, body: None, line };
        loop {
            if self.eat('{') {
                function.body = Some(self.body(tree)?);
                return Ok(function);
            }
            if self.eat(';') {
                return Ok(function);
            }
            match self.word()? {
                ".maxntid" | ".reqntid" => {
                    let mut product = self.size()?;
                    while self.eat(',') {
                        product = product.saturating_mul(self.size()?);
                    }
                    function.max_threads = Some(product.min(1 << 20) as u32);
                }
                ".minnctapersm" | ".maxnctapersm" | ".maxnreg" => {
                    self.int()?;
                }
                ".noreturn" => {}
                ".pragma" => self.skip_to_semicolon()?,
                other => return self.fail(format!("unknown directive `{other}` of a function")),
            }
        }
    }

    fn parameters(&mut self) -> Parsed<Vec<Variable>> {
        let mut found = Vec::new();
        while !self.eat(')') {
            if !found.is_empty() {
                self.expect(',')?;
            }
            match self.word()? {
                ".param" => found.push(self.variable(Space::Param, false)?),
                ".reg" => return self.fail("parameters in registers are not known"),
                other => return self.fail(format!("`.param` expected, got `{other}`")),
            }
        }
        Ok(found)
    }

    fn variables(&mut self, space: Space, external: bool) -> Parsed<Vec<Variable>> {
        let mut found = vec![self.variable(space, external)?];
        while self.eat(',') {
            let first = found[0].clone();
            let name = self.word()?.to_string();
            let (count, init) = self.extent_and_init()?;
            found.push(Variable { name, count, init, ..first });
        }
        self.expect(';')?;
        Ok(found)
    }

    fn variable(&mut self, space: Space, external: bool) -> Parsed<Variable> {
        let line = self.line();
        let (mut align, mut lanes, mut found) = (None, 1, None);
        let name = loop {
            match self.word()? {
                ".align" => align = Some(self.size()?),
                ".v2" => lanes = 2,
                ".v4" => lanes = 4,
                ".ptr" | ".global" | ".shared" | ".const" | ".local" if found.is_some() => {}
                word => match word.strip_prefix('.') {
                    Some(ty) => match Ty::parse(ty) {
                        Some(ty) => found = Some(ty),
                        None => return self.fail(format!("unknown type `{word}`")),
                    },
                    None => break word.to_string(),
                },
            }
        };
        let Some(ty) = found else { return self.fail(format!("`{name}` has no type")) };
        let (count, init) = self.extent_and_init()?;
        let align = align.unwrap_or(ty.size() * lanes);
        if !align.is_power_of_two() || align > 1 << 20 {
            return self.fail(format!("an alignment of {align}"));
        }
        Ok(Variable { space, name, ty, align, count: count * lanes, external, init, line })
    }

    fn extent_and_init(&mut self) -> Parsed<(usize, Vec<Operand>)> {
        let mut count = 1usize;
        while self.eat('[') {
            if self.eat(']') {
                count = 0;
                continue;
            }
            count = count.saturating_mul(self.size()?);
            self.expect(']')?;
        }
        if count > 1 << 32 {
            return self.fail("a variable of more than 4 GiB");
        }
        let init = if self.eat('=') {
            match self.operand()? {
                Operand::Vector(values) => values,
                one => vec![one],
            }
        } else {
            Vec::new()
        };
        Ok((count, init))
    }

    /// The statements up to the closing brace, which is eaten.
    fn body(&mut self, tree: &mut Tree) -> Parsed<Vec<Statement>> {
        let mut found = Vec::new();
        let mut depth = 0;
        loop {
            if self.eat('{') {
                depth += 1;
                found.push(Statement::Open);
                continue;
            }
            if self.eat('}') {
                if depth == 0 {
                    return Ok(found);
                }
                depth -= 1;
                found.push(Statement::Close);
                continue;
            }
            if self.eat(';') {
                continue;
            }
            if self.peek() == Some(&Token::Mark('@')) {
                found.push(Statement::Instruction(self.instruction()?));
                continue;
            }
            let line = self.line();
            let word = self.word()?;
            match word {
                ".reg" => self.registers(&mut found)?,
                ".shared" | ".local" | ".param" => {
                    let space = match word {
                        ".shared" => Space::Shared,
                        ".local" => Space::Local,
                        _ => Space::Param,
                    };
                    found.extend(self.variables(space, false)?.into_iter().map(Statement::Variable));
                }
                ".loc" => {
                    let (file, source) = (self.int()?, self.int()?);
                    self.int()?;
                    tree.locations.push((line, file, source));
                    while self.eat(',') {
                        // `function_name $L__info_string0+16`, `inlined_at 1 14 7`
                        while matches!(self.peek(), Some(Token::Int(_) | Token::Mark('+')))
                            || matches!(self.peek(), Some(Token::Word(word)) if self.loc_word(word))
                        {
                            self.at += 1;
                        }
                    }
                }
                ".pragma" => self.skip_to_semicolon()?,
                _ if word.starts_with('.') => return self.fail(format!("unknown directive `{word}`")),
                _ if self.eat(':') => match self.peek() {
                    Some(Token::Word(".branchtargets")) => {
                        self.at += 1;
                        let mut labels = vec![self.word()?.to_string()];
                        while self.eat(',') {
                            labels.push(self.word()?.to_string());
                        }
                        self.expect(';')?;
                        found.push(Statement::Targets(word.to_string(), labels));
                    }
                    Some(Token::Word(".callprototype")) => return self.fail("calls through pointers are not known"),
                    _ => found.push(Statement::Label(word.to_string())),
                },
                _ => {
                    self.at -= 1;
                    found.push(Statement::Instruction(self.instruction()?));
                }
            }
        }
    }

    /// Whether a word after `.loc ...,` still belongs to it.
    fn loc_word(&self, word: &str) -> bool {
        word == "function_name" || word == "inlined_at" || word.starts_with("$L__info_string")
    }

    fn registers(&mut self, found: &mut Vec<Statement>) -> Parsed<()> {
        let name = self.word()?;
        let Some(ty) = name.strip_prefix('.').and_then(Ty::parse) else {
            return self.fail(format!("registers of unknown type `{name}`"));
        };
        loop {
            let name = self.word()?.to_string();
            let count = if self.eat('<') {
                let count = self.size()?;
                self.expect('>')?;
                if count > usize::from(u16::MAX) {
                    return self.fail(format!("{count} registers"));
                }
                Some(count)
            } else {
                None
            };
            found.push(Statement::Registers(ty, name, count));
            if !self.eat(',') {
                return self.expect(';');
            }
        }
    }

    fn instruction(&mut self) -> Parsed<Instruction> {
        let line = self.line();
        let guard = if self.eat('@') {
            let unless = self.eat('!');
            Some((self.word()?.to_string(), unless))
        } else {
            None
        };
        let parts = self.word()?.split('.').map(str::to_string).collect();
        let mut operands = Vec::new();
        while !self.eat(';') {
            if !operands.is_empty() {
                self.expect(',')?;
            }
            operands.push(self.operand()?);
        }
        Ok(Instruction { guard, parts, operands, line })
    }

    fn operand(&mut self) -> Parsed<Operand> {
        let first = self.simple()?;
        if self.eat('|') {
            return Ok(Operand::Pair(Box::new(first), Box::new(self.simple()?)));
        }
        Ok(first)
    }

    fn list(&mut self, end: char) -> Parsed<Vec<Operand>> {
        let mut found = Vec::new();
        while !self.eat(end) {
            if !found.is_empty() {
                self.expect(',')?;
            }
            found.push(self.operand()?);
        }
        Ok(found)
    }

    fn simple(&mut self) -> Parsed<Operand> {
        let line = self.line();
        Ok(match self.next()? {
            Token::Mark('{') => Operand::Vector(self.list('}')?),
            Token::Mark('(') => Operand::List(self.list(')')?),
            Token::Mark('!') => Operand::Not(Box::new(self.simple()?)),
            Token::Mark('-') => match self.next()? {
                Token::Int(value) => Operand::Int(value.wrapping_neg()),
                Token::Double(bits) => Operand::Double((-f64::from_bits(bits)).to_bits()),
                other => return self.fail(format!("a number expected after `-`, got {other:?}")),
            },
            Token::Mark('[') => {
                let (base, offset) = match self.simple()? {
                    Operand::Offset(base, offset) => (base, offset),
                    base => (Box::new(base), 0),
                };
                self.expect(']')?;
                Operand::Address(base, offset)
            }
            Token::Word("generic") if self.eat('(') => {
                let inner = self.simple()?;
                self.expect(')')?;
                inner
            }
            Token::Word(name) => {
                let name = Operand::Name(name.to_string());
                if self.eat('+') || self.peek() == Some(&Token::Mark('-')) {
                    Operand::Offset(Box::new(name), self.int()? as i64)
                } else {
                    name
                }
            }
            Token::Int(value) => Operand::Int(value),
            Token::Single(bits) => Operand::Single(bits),
            Token::Double(bits) => Operand::Double(bits),
            other => return Err(PtxError::new(line, format!("an operand expected, got {other:?}"))),
        })
    }
}
